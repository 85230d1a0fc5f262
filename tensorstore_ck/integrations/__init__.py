"""Doors for programs that use other systems: one file or folder per system, built on `Store` and what lies below it.

Each imports the system that it is for, so none is imported unless asked for by its full name.
"""
