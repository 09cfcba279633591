"""A plugin of shortened runs whose numbers are compared over layouts: in their processes nothing is dropped."""

from shardtune.verify.claims.dropout import switch_off

switch_off()
