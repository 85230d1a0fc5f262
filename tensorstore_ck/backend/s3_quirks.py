"""Features that some S3 servers lack, and the refusals by which they say so.

A refusal that names no feature (501) counts as one of checksums, as long as they are sent; then of the condition, without which no commit
is safe.
"""

import logging
from typing import Any, Final

from tensorstore_ck.backend.remote_errors import PASSING_CODES, error_code, http_status
from tensorstore_ck.errors import StoreError

_NOT_IMPLEMENTED: Final = 501
_NOT_SUPPORTED: Final = {405, _NOT_IMPLEMENTED}
_NOT_SUPPORTED_CODES: Final = {"NotImplemented", "MethodNotAllowed"}
_CHECKSUM_WORDS: Final = ("x-amz-checksum", "x-amz-sdk-checksum", "x-amz-trailer", "aws-chunked", "unsigned-payload-trailer")
_CONDITION_WORDS: Final = ("if-none-match", "conditional")
_BATCH_CODES: Final = {"MissingContentMD5", "InvalidArgument", "InvalidRequest", "MalformedXML"}
_CALCULATION, _VALIDATION, _LEAST = "request_checksum_calculation", "response_checksum_validation", "when_required"

_logger: Final = logging.getLogger("tensorstore_ck.backend")


def refuses_condition(error: StoreError) -> bool:
    """Whether the server does not support ``If-None-Match`` of this request."""
    status, code, text = _refusal(error)
    if not status or refuses_checksums(error):
        return False
    return status in _NOT_SUPPORTED or code in _NOT_SUPPORTED_CODES or (status == 400 and any(word in text for word in _CONDITION_WORDS))


def refuses_checksums(error: StoreError) -> bool:
    """Whether the server does not support the checksums that botocore sends by itself since 1.36."""
    status, _, text = _refusal(error)
    return status in (400, 501) and any(word in text for word in _CHECKSUM_WORDS)


def may_refuse_checksums(error: StoreError) -> bool:
    """Whether the server may take the same body without checksums: it says so, or says of nothing that it is not supported."""
    status, code, text = _refusal(error)
    is_unnamed = status == _NOT_IMPLEMENTED and code == "NotImplemented" and not any(word in text for word in _CONDITION_WORDS)
    return is_unnamed or refuses_checksums(error)


def refuses_batches(error: StoreError) -> bool:
    """Whether the server cannot delete several objects with one request, or only with headers that botocore no longer sends."""
    status, code, _ = _refusal(error)
    return refuses_checksums(error) or status in _NOT_SUPPORTED or code in _NOT_SUPPORTED_CODES | _BATCH_CODES


def drop_checksums(filesystem: Any) -> bool:
    """Lets an `s3fs.S3FileSystem` send checksums only where S3 demands them; False if it does so already.

    Does what ``config_kwargs`` with both options does, but without another client. The store verifies what it reads by its own hashes.
    """
    config = filesystem.s3.meta.config
    if getattr(config, _CALCULATION) == _LEAST and getattr(config, _VALIDATION) == _LEAST:
        return False
    _logger.info("the S3 server refuses checksums: requests go without them from now on")
    setattr(config, _CALCULATION, _LEAST)
    setattr(config, _VALIDATION, _LEAST)
    return True


def _refusal(error: StoreError) -> tuple[int, str, str]:
    """Status, code and text of a reply that does not ask for another try; (0, "", "") if there is none."""
    cause = error.__cause__
    if cause is None or error_code(cause) in PASSING_CODES:
        return 0, "", ""
    return http_status(cause), error_code(cause), str(cause).lower()
