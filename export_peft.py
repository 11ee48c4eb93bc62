"""A run's adapter as a peft folder, the form that serving engines and `PeftModel.from_pretrained` load.

    python export_peft.py runs/flowgrpo            writes runs/flowgrpo/peft

The folder holds adapter_config.json and adapter_model.safetensors, the run folder's own adapter under peft's names;
it is a copy, so it is written when asked for only.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import save_file

from model_files import ADAPTER_FILE
from run_folder import run_script

PREFIX, PEFT_PREFIX = "transformer.", "base_model.model."


def export_peft(run: Path, folder: Path) -> None:
    """Write the adapter of a run folder as a peft folder. Raises ValueError where there is none."""
    if not (run / ADAPTER_FILE).is_file():
        raise ValueError(f"{run} holds no {ADAPTER_FILE}: name the folder of a finished LoRA run")
    with safe_open(run / ADAPTER_FILE, framework="pt") as file:
        if "lora_adapter_metadata" not in (file.metadata() or {}):
            raise ValueError(
                f"{run / ADAPTER_FILE} has no lora_adapter_metadata, which holds alpha: export a run's own"
            )
        metadata = json.loads(file.metadata()["lora_adapter_metadata"])
        tensors = {PEFT_PREFIX + name.removeprefix(PREFIX): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    config = {name.removeprefix(PREFIX): value for name, value in metadata.items()}
    del config["peft_version"]  # what peft writes by itself
    base_model = None
    if (run / "args.json").is_file():
        base_model = json.loads((run / "args.json").read_text())["args"]["pretrained_model_name_or_path"]
    config |= {"inference_mode": True, "base_model_name_or_path": base_model}
    LoraConfig.from_peft_type(**config).save_pretrained(folder)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def main(argv: Sequence[str] | None = None) -> None:
    """Write RUN/peft, or the folder that is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("run", type=Path, help="folder of a finished LoRA run")
    parser.add_argument("folder", type=Path, nargs="?", help="where to write; default RUN/peft")
    args = parser.parse_args(argv)
    folder = args.folder or args.run / "peft"
    export_peft(args.run, folder)
    print(f"adapter_config.json and adapter_model.safetensors are in {folder}")


if __name__ == "__main__":
    sys.exit(run_script(main))
