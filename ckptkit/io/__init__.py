"""Bytes without knowledge of formats: torch zip records, restricted unpickling, places to read from, staged output."""
