"""Programs that are sampled: deep in Python or in C, always elsewhere, or blocked."""

from __future__ import annotations

DEEP = """
import sys
sys.setrecursionlimit(10_000)
def deep(n):
    if n:
        return deep(n - 1)
    print("ready", flush=True)
    while True:
        pass
deep(int(sys.argv[1]) - 2)
"""
BUSY = """
import sys
def ping(n):
    return pong(n - 1) if n else 0
def pong(n):
    return 1 + ping(n - 1) if n else 0
print("ready", flush=True)
while True:
    for n in range(8, 12):
        ping(n)
"""
NATIVE = """
#include <stdio.h>
#include <stdlib.h>
volatile unsigned long turns;
__attribute__((noinline)) static void deep(int n)
{
	if (n > 1) {
		deep(n - 1);
		turns++;
		return;
	}
	puts("ready");
	fflush(stdout);
	for (;;)
		turns++;
}
int main(int argc, char **argv)
{
	deep(atoi(argv[1]) - 1);
	return 0;
}
"""
WAITING = """
import sys, threading
threading.stack_size(1 << 17)
gate = threading.Event()
def deep(n):
    return deep(n - 1) if n else gate.wait()
threads = [threading.Thread(target=deep, args=(int(sys.argv[2]),)) for _ in range(int(sys.argv[1]))]
for t in threads:
    t.daemon = True
    t.start()
print("ready", flush=True)
sys.stdin.readline()
"""
