"""What every room stands on: errors, the console, processes, git, files, downloads, pip, and where things lie."""
