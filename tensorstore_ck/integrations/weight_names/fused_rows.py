"""Which rows of a fused weight of Megatron-core are whose.

``linear_qkv`` has, for each query group, the rows of the group's queries, then those of its key, then those of its value
(`SelfAttention.get_query_key_value_tensors`). ``linear_fc1`` of a gated MLP has all rows of the gate, then all of up.
"""

from typing import NamedTuple

from tensorstore_ck.integrations.weight_names.names_file import Rule, WeightNames


class RowRun(NamedTuple):
    """Consecutive rows that one part has in common with the fused weight."""

    fused: int
    """The first row there."""
    part: int
    """The first row in the part."""
    rows: int


def row_runs(rule: Rule, names: WeightNames, rows: int) -> list[list[RowRun]]:
    """For each part the runs of its rows, in order; of a fused weight of `rows` rows. Raises `ValueError` if `rows` does not fit."""
    if rule.fusion == "names":
        return [[RowRun(0, 0, rows)]]
    if rule.fusion == "gate_up":
        if rows % 2:
            raise ValueError(f"{rows} rows are not those of a gate and of as many of up")
        half = rows // 2
        return [[RowRun(0, 0, half)], [RowRun(half, 0, half)]]
    heads, groups = names.attention_heads, names.query_groups
    if rows % (heads + 2 * groups):
        raise ValueError(f"{rows} rows are not those of {heads} attention heads and {groups} query groups")
    head = rows // (heads + 2 * groups)
    queries = heads // groups * head
    group = queries + 2 * head
    return [
        [RowRun(number * group, number * queries, queries) for number in range(groups)],
        [RowRun(number * group + queries, number * head, head) for number in range(groups)],
        [RowRun(number * group + queries + head, number * head, head) for number in range(groups)],
    ]
