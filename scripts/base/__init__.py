"""What every room stands on: errors, console, processes, git, files, downloads, pip, and places."""
