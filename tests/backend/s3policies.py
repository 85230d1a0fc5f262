"""IAM's view of S3 requests: which action a request is on which key, and whether policy documents allow it.

What the documents in ``docs/operations/policies`` need of the language, and no more: anything else is an error, not an answer.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree

from tests.backend.chaos import Fault, Plan, Request


class Access(NamedTuple):
    """What IAM is asked about one object, or about the bucket."""

    action: str
    """Without its ``s3:``."""
    key: str
    """Empty for the bucket; of a listing, its prefix."""
    context: Mapping[str, str]
    """Condition keys, where the request has them."""
    operation: str
    """S3's name for the request, with ``if-none-match`` where the request carries that."""

    @property
    def creates(self) -> bool:
        """Whether an object is there after the request."""
        return self.context.get("s3:ObjectCreationOperation") == "true"


def accesses(request: Request) -> list[Access]:
    """What a request to a bucket asks for: one thing, save for a deletion of several objects."""
    parts = urlsplit(request.path)
    _, _, key = unquote(parts.path).lstrip("/").partition("/")
    query = parse_qs(parts.query, keep_blank_values=True)
    headers = {name.lower(): value for name, value in request.headers.items()}
    context = {"s3:if-none-match": headers["if-none-match"]} if "if-none-match" in headers else {}
    suffix = " if-none-match" if context else ""

    def put(operation: str, *, creates: bool) -> list[Access]:
        return [Access("PutObject", key, {**context, "s3:ObjectCreationOperation": str(creates).lower()}, operation + suffix)]

    match request.method, bool(key), set(query) & {"uploads", "uploadId", "partNumber", "delete", "list-type"}:
        case "PUT", True, found if not found:
            return put("PutObject", creates=True)
        case "PUT", True, found if "partNumber" in found:
            return put("UploadPart", creates=False)
        case "POST", True, found if "uploads" in found:
            return put("CreateMultipartUpload", creates=False)
        case "POST", True, found if "uploadId" in found:
            return put("CompleteMultipartUpload", creates=True)
        case "DELETE", True, found if "uploadId" in found:
            return [Access("AbortMultipartUpload", key, {}, "AbortMultipartUpload")]
        case "DELETE", True, _:
            return [Access("DeleteObject", key, {}, "DeleteObject")]
        case "GET", True, found if "uploadId" in found:
            return [Access("ListMultipartUploadParts", key, {}, "ListParts")]
        case (("GET" | "HEAD"), True, _):
            return [Access("GetObject", key, {}, "GetObject" if request.method == "GET" else "HeadObject")]
        case "POST", False, found if "delete" in found:
            keys = [found.text or "" for found in ElementTree.fromstring(request.body).iter() if found.tag.endswith("Key")]
            return [Access("DeleteObject", each, {}, "DeleteObjects") for each in keys]
        case "GET", False, found if "uploads" in found:
            return [Access("ListBucketMultipartUploads", "", {}, "ListMultipartUploads")]
        case "GET", False, _:
            prefix = query.get("prefix", [""])[0]
            return [Access("ListBucket", "", {"s3:prefix": prefix}, "ListObjectsV2")]
    raise AssertionError(request)


def allows(documents: Sequence[Mapping[str, Any]], access: Access, bucket: str) -> bool:
    """Whether the documents of one identity allow it: some statement does, and none denies it."""
    resource = f"arn:aws:s3:::{bucket}/{access.key}" if access.key else f"arn:aws:s3:::{bucket}"
    effects = set()
    for statement in (each for document in documents for each in document["Statement"]):
        assert set(statement) <= {"Sid", "Effect", "Action", "Resource", "Condition"}, statement
        if not any(fnmatchcase(f"s3:{access.action}", action) for action in _many(statement["Action"])):
            continue
        if not any(fnmatchcase(resource, pattern) for pattern in _many(statement["Resource"])):
            continue
        if all(_holds(operator, wanted, access.context) for operator, wanted in statement.get("Condition", {}).items()):
            effects.add(statement["Effect"])
    return effects == {"Allow"}


def _many(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _holds(operator: str, wanted: Mapping[str, Any], context: Mapping[str, str]) -> bool:
    match operator:
        case "Null":
            return all((key not in context) == (value == "true") for key, value in wanted.items())
        case "Bool":
            return all(context.get(key) == value for key, value in wanted.items())
        case "StringLike":
            return all(any(fnmatchcase(context.get(key, ""), each) for each in _many(value)) for key, value in wanted.items())
    raise AssertionError(operator)


def enforced(documents: Sequence[Mapping[str, Any]], bucket: str) -> Plan:
    """A proxy's plan that refuses what the documents do not allow, as S3 would."""

    def plan(request: Request) -> Fault:
        return Fault.NONE if all(allows(documents, access, bucket) for access in accesses(request)) else Fault.STATUS_403

    return plan
