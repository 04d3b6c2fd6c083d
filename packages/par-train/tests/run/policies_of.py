"""The policies of a `Run` from keywords without groups, so that a test names what it changes and nothing else."""

from dataclasses import fields

from par_train import CheckpointPolicy, LoggingPolicy, MonitoringPolicy

KINDS = {"checkpoint": CheckpointPolicy, "logging": LoggingPolicy, "monitoring": MonitoringPolicy}
RENAMED = {"checkpoint_every": ("checkpoint", "every"), "log_every": ("logging", "every")}


def policies_of(**flat):
    """Sort keywords by the policy that has a field of this name; other ones stay as they are."""
    found = {name: {} for name in KINDS}
    given = {}
    of_field = {each.name: (name, each.name) for name, kind in KINDS.items() for each in fields(kind)}
    for key, value in flat.items():
        kind, field = {**of_field, **RENAMED}.get(key, (None, key))
        (found[kind] if kind else given)[field] = value
    return {**given, **{name: KINDS[name](**values) for name, values in found.items() if values}}
