"""Conversations as samples, with the loss on the answers."""
