"""From texts, chats or a user's dataset to batches on the device.

Nothing is imported here, so that importing one module does not import the others.
"""
