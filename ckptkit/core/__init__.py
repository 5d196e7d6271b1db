"""The core: boxes, trees, checkpoints, layouts, plans and the one loop that moves bytes. Imports no torch."""
