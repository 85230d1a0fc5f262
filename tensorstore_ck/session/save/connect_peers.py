"""Brings the ranks of a group together whose staged files are kept on other hosts as well. Loads torch."""

import logging
from typing import TYPE_CHECKING, Final

from tensorstore_ck.backend.staging import StagingTier
from tensorstore_ck.common.ids import ulid_text
from tensorstore_ck.errors import BackendUnavailableError
from tensorstore_ck.session.save.context import SaveContext

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

PEER_SECONDS: Final = 600.0
"""How long a rank may take to come, or to send or take a piece."""

_logger: Final = logging.getLogger("tensorstore_ck")


def connect_peers(context: SaveContext, tier: StagingTier, group: "ProcessGroup", timeout_seconds: float) -> None:
    """Connects this rank with those that keep copies of its files; all ranks of `group` call it, once. Without them no put fails."""
    from tensorstore_ck.session.peers import Replicator, connect, host_of_folder  # noqa: PLC0415 - loads torch

    title = "the search for the hosts of each rank's staging disk"
    hosts = context.groups.all_gather(group, title, lambda: host_of_folder(tier.folder.path), timeout_seconds=timeout_seconds)
    copies = tier.options.replicate_to_peers
    name = f"{context.engine.config.uuid}/{ulid_text(context.groups.of(group)[0].nonce)}"
    try:
        link = connect(group, hosts, copies, name, timeout_seconds=min(timeout_seconds, PEER_SECONDS))
    except BackendUnavailableError as exc:
        _logger.warning("%s", exc)
        return
    context.replicators[group] = Replicator(link, tier.folder, hosts, copies)
