"""The command line: each command's arguments, what it calls, and its tables and answers."""
