"""Readers of what serving engines write, each small and strict; none runs or unpickles anything."""
