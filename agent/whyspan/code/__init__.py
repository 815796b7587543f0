"""Names the code that threads were in: interpreters found, stacks read, code objects named. Live side only."""
