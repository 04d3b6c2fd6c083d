"""The same model, data and seed under every configuration; see `docs/concepts/matrix.md`."""
