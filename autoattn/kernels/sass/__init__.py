"""What a kernel's machine code says: disassembly, and the loops over keys."""
