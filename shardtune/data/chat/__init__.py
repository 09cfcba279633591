"""Conversations as tokens, and which of them are trained."""

from shardtune.data.chat.encoder import ChatEncoder

__all__ = ["ChatEncoder"]
