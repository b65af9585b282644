"""Drafts from what the group has said: who drafts, how much of it is sent, and what it is worth."""
