"""One key convention a file: what the keys of a container mean. The folder is the registry."""
