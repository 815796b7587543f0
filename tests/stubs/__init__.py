"""Stand-ins for what this machine lacks; each says what it stands for. They lie under the real code."""
