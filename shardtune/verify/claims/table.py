"""The claims by the names that are typed."""

from __future__ import annotations

from shardtune.verify.claims.claim import Claim
from shardtune.verify.claims.elastic import check_elastic
from shardtune.verify.claims.export import check_export
from shardtune.verify.claims.layouts import check_layouts
from shardtune.verify.claims.parity import check_parity
from shardtune.verify.claims.preempt import check_preempt
from shardtune.verify.claims.resume import check_resume

CLAIMS = (
    Claim("resume", "stopped and continued, a run equals the uninterrupted one bit by bit", check_resume),
    Claim("preempt", "stopped by SIGTERM at random moments, a run loses nothing", check_preempt),
    Claim("elastic", "numbers do not depend on the number of ranks", check_elastic),
    Claim("parity", "losses, norms and weights are those of a plain PyTorch loop over the same rows", check_parity),
    Claim("layouts", "packed, sharded, compiled: the numbers are those of one process", check_layouts),
    Claim("export", "what a run leaves is the trained model for transformers and PEFT alone", check_export),
)
