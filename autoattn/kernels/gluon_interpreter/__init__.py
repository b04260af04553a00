"""An interpreter of the Gluon subset that the templates use, on the CPU: numbers, deadlocks and missed barriers."""
