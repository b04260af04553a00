"""From a kernel's source to its launch: compiler, assembler, interpreter, host side of each operation."""
