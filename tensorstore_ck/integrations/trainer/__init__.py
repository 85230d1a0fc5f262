"""What the adapters of trainers have in common; each trainer's folder says what that trainer is like.

versions.py   which versions of a trainer's package are supported, and whether the names that are used are as they were
"""
