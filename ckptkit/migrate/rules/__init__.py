"""One migration rule a file; the folder is the registry (see `ckptkit/migrate/rule.py`)."""
