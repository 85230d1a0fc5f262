"""Which snapshots of a branch's history stay, by rules that are stored in the store.

policy.py             the rules, as users write them and as the log stores them; refuses what is not a rule
choose_kept.py        which snapshots a policy keeps, and why: pure
expire_operations.py  policies applied to a branch, at one entry of the log
age_rules.py          where snapshots should lie as they age, and how they are encoded
write_share.py        how fast one of several jobs may write
"""

from tensorstore_ck.log.retention.choose_kept import KeepCandidate, Verdict, choose
from tensorstore_ck.log.retention.expire_operations import (
    UnmatchedRuleWarning,
    candidates,
    expire,
    expire_at_save,
    policies_of,
    tags_and_pins,
    unmatched_rules,
    verdicts,
)
from tensorstore_ck.log.retention.policy import Best, Policy, parse_rule
from tensorstore_ck.log.retention.write_share import job_rate

__all__ = [
    "Best",
    "KeepCandidate",
    "Policy",
    "UnmatchedRuleWarning",
    "Verdict",
    "candidates",
    "choose",
    "expire",
    "expire_at_save",
    "job_rate",
    "parse_rule",
    "policies_of",
    "tags_and_pins",
    "unmatched_rules",
    "verdicts",
]
