"""Tests of loading into and saving from live models."""
