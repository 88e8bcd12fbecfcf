"""What a run keeps in its folder: status, metrics, identity, outputs, uploads, and what earlier attempts left."""
