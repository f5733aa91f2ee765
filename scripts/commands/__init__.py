"""The command line: for each command its arguments, what it calls, and the tables and answers that people and programs read."""
