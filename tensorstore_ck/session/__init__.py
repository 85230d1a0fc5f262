"""What a job does with its open store: saves and restores, alone or as ranks of a group, at once or in the background."""
