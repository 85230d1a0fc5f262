"""Weights of Hugging Face under the names of Megatron-core, and back, by a file that says which is which.

names_file.py   the file, parsed
conversion.py   which rows of which tensor make each tensor of the other side
states.py       converts a state in memory
content.py      converts a stored snapshot, while it is read

Every tensor is made of whole rows of others, so nothing is computed and every bit stays.
"""

from tensorstore_ck.integrations.weight_names.names_file import read_names

__all__ = ["read_names"]
