#!/usr/bin/env python3
"""Draw a picture with a small Flux pipeline on the CPU, or set two pictures side by side.

    python tiny_flux_image.py PIPELINE -o before.png
    python tiny_flux_image.py PIPELINE --quantized FOLDER -o after.png
    python tiny_flux_image.py PIPELINE --quantized FOLDER --compare before.png after.png -o side_by_side.png

FOLDER holds quantized components by name (transformer/, text_encoder_2/ …), as aoquant writes them. Plain
diffusers and transformers load them, and they replace the pipeline's own. The last form also prints sizes.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from PIL import Image, ImageChops, ImageDraw, ImageStat

PROMPT = "a small red fox in the snow, 35 mm"

for name in ("torchao", "torch.utils._pytree", "diffusers.quantizers.torchao.torchao_quantizer"):
    logging.getLogger(name).addFilter(lambda record: False)  # what they say while they are imported helps nobody


def quantized_components(folder: Path) -> list[str]:
    """The names of the subfolders whose config.json speaks of quantization."""
    configs = sorted(folder.glob("*/config.json"))
    names = [file.parent.name for file in configs if "quantization_config" in json.loads(file.read_text())]
    if not names:
        raise SystemExit(f"{folder} has no quantized component")
    return names


def load_component(pipeline: Path, folder: Path, name: str) -> Any:
    """The component `name` of `folder`, by its library's own loader, in bfloat16."""
    import diffusers
    import torch
    import transformers

    library, class_name = json.loads((pipeline / "model_index.json").read_text())[name]
    if library == "transformers":
        cls = getattr(transformers, class_name)
        return cls.from_pretrained(str(folder), subfolder=name, dtype=torch.bfloat16)
    # diffusers finds a .bin in shards only where it is told not to look for safetensors.
    options = {"use_safetensors": False} if any((folder / name).glob("*.bin*")) else {}
    return diffusers.AutoModel.from_pretrained(str(folder), subfolder=name, dtype=torch.bfloat16, **options)


def draw(pipeline: Path, quantized: Path | None, *, size: int, steps: int, seed: int, prompt: str) -> Image.Image:
    """One picture of size x size pixels; the same arguments give the same one."""
    import diffusers
    import torch
    import transformers

    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
    components = {}
    if quantized:
        components = {name: load_component(pipeline, quantized, name) for name in quantized_components(quantized)}
    flux = diffusers.FluxPipeline.from_pretrained(str(pipeline), dtype=torch.bfloat16, **components)
    flux.set_progress_bar_config(disable=True)
    noise = torch.Generator().manual_seed(seed)
    result = flux(prompt, height=size, width=size, num_inference_steps=steps, generator=noise)
    image: Image.Image = result.images[0]
    return image


def side_by_side(before: Image.Image, after: Image.Image) -> tuple[Image.Image, float]:
    """Both pictures and ten times their difference in a row, and the mean absolute difference of 0 … 255."""
    if before.size != after.size:
        raise SystemExit(f"the pictures differ in size: {before.size} and {after.size}")
    before, after = before.convert("RGB"), after.convert("RGB")
    difference = ImageChops.difference(before, after)
    panels = {
        "original": before,
        "quantized": after,
        "difference x 10": difference.point([min(255, 10 * value) for value in range(256)] * 3),
    }
    width, height = before.size
    margin, title = 8, 20
    sheet = Image.new("RGB", (3 * width + 4 * margin, height + title + margin), "white")
    pen = ImageDraw.Draw(sheet)
    for number, (label, panel) in enumerate(panels.items()):
        left = margin + number * (width + margin)
        pen.text((left, 4), label, fill="black")
        sheet.paste(panel, (left, title))
    return sheet, sum(ImageStat.Stat(difference).mean) / 3


def weight_bytes(folder: Path) -> int:
    files = [file for suffix in ("bin", "safetensors") for file in folder.glob(f"*.{suffix}")]
    return sum(file.stat().st_size for file in files)


def size_table(pipeline: Path, quantized: Path) -> str:
    """Bytes of weights on disk, before and after, a line for each quantized component."""
    lines = [f"{'component':<18}{'original':>12}{'quantized':>12}{'ratio':>8}"]
    for name in quantized_components(quantized):
        before, after = weight_bytes(pipeline / name), weight_bytes(quantized / name)
        lines.append(f"{name:<18}{before / 1e6:>9.2f} MB{after / 1e6:>9.2f} MB{after / before:>8.2f}")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", type=Path, help="a folder with model_index.json")
    parser.add_argument("--quantized", type=Path, metavar="FOLDER", help="take quantized components from it")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("A.png", "B.png"), help="draw nothing new")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="IMAGE.png")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--size", type=int, default=256, help="pixels, a multiple of 16 (default 256)")
    parser.add_argument("--steps", type=int, default=4, help="denoising steps (default 4)")
    parser.add_argument("--seed", type=int, default=0, help="of the noise it starts from (default 0)")
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.compare:
        sheet, mean = side_by_side(*(Image.open(file) for file in args.compare))
        sheet.save(args.output)
        if args.quantized:
            print(size_table(args.pipeline, args.quantized))
        print(f"mean absolute pixel difference: {mean:.2f} of 255")
        print(f"{args.output}: original | quantized | difference x 10")
        return
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    start = time.perf_counter()
    image = draw(
        args.pipeline,
        args.quantized,
        size=args.size,
        steps=args.steps,
        seed=args.seed,
        prompt=args.prompt,
    )
    image.save(args.output)
    seconds = time.perf_counter() - start
    print(f"{args.output}: {args.size} x {args.size} pixels, {args.steps} steps, {seconds:.1f} s")


if __name__ == "__main__":
    main()
