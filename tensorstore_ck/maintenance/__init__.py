"""What people do with a store, offline or while jobs use it: check, repair, copy, describe, forget, apply policies. No torch."""
