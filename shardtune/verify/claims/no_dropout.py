"""A plugin of shortened runs whose numbers are compared over layouts: in their processes nothing is dropped."""

from shardtune.verify.claims.dropout import without_dropout

_off = without_dropout()
_off.__enter__()
