"""What a checkpoint of several ranks is to be, from what each has reported of its part."""

import base64
from typing import Any

import msgspec
from msgspec.structs import replace

from trainer_plugin.checkpoints.manifest import Manifest
from trainer_plugin.checkpoints.shard_files import metadata_of


def plan_of(parts: dict[int, Any], draft: Manifest | None, *, tier: str) -> dict[str, Any]:
    """Manifest without files, content of `.metadata` in base64, and each rank's files; or an `error`.

    A report has `files`, their `holders`, whether all in them is `finite`, and what is `known` of the tensors in them;
    that of the first rank may have the content of `.metadata` instead. Or it has an `error`. `draft` is the manifest as
    far as the first rank knows it.
    """
    for rank, part in sorted(parts.items()):
        if "error" in part:
            return {"error": f"rank {rank}: {part['error']}"}
    if draft is None:
        return {"error": "rank 0 has no manifest"}
    content = parts[0].get("metadata")
    if content is None:
        content = base64.b64encode(metadata_of(parts[rank]["known"] for rank in sorted(parts))).decode()
    whole = replace(
        draft,
        files={},
        holders={name: ranks for rank in sorted(parts) for name, ranks in parts[rank]["holders"].items()},
        ranks=len(parts),
        finite=all(part["finite"] for part in parts.values()),
        tier=tier,
        partial=False,
    )
    files = {str(rank): msgspec.to_builtins(part["files"]) for rank, part in parts.items()}
    return {"manifest": msgspec.to_builtins(whole), "metadata": content, "files": files}
