"""The claims by the names that are typed."""

from __future__ import annotations

from shardtune.verify.claims.claim import Claim
from shardtune.verify.claims.resume import check_resume

CLAIMS = (Claim("resume", "stopped and continued, a run equals the uninterrupted one bit by bit", check_resume),)
