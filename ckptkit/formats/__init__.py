"""One container a file: how bytes lie on disk. The folder is the registry."""
