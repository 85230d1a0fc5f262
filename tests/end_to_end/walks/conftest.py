"""Where a walk finds its bucket."""

import uuid

import pytest

from tests.servers import BUCKET, KEY, SECRET, S3Server


@pytest.fixture
def url(seaweedfs_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A location in a bucket; how to reach it is in the environment, as users have it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", seaweedfs_server.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    return f"s3://{BUCKET}/{uuid.uuid4()}"
