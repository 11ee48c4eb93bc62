"""Score images of known order on several ranks, each with a worker process, and save the gathered table.

ACCELERATE_USE_CPU=1 torchrun --nproc_per_node 2 tests/score_on_ranks.py table.pt jpeg_compressibility ...
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from prompts import batch_samples, rank_batches
from rewards import GLYPH_LAYOUT, check_rewards, draw_ink
from scorer import Scorer

NUM_SAMPLES, BATCH_SIZE = 12, 2


def sample_prompt(sample: int) -> str:
    return f'number {sample}: "{sample % 10}"'


def sample_image(sample: int) -> torch.Tensor:
    """(3, 64, 64): a digit, right for every other sample, on a ground that is coloured by the sample's number."""
    digit = (sample + sample % 2) % 10
    ink = torch.tensor(list(draw_ink(str(digit), GLYPH_LAYOUT[1], (64, 64)).getdata())).view(64, 64) / 255
    ground = torch.tensor([1 - sample / 60, 1.0, 1 - sample / 90]).view(3, 1, 1)
    return ground * (1 - ink)


if __name__ == "__main__":
    from sharding import make_accelerator, reduce_to_cpu  # here, since each worker imports this file again

    accelerator = make_accelerator()
    assert accelerator.num_processes == 2
    path, names = sys.argv[1], check_rewards(sys.argv[2:])
    scorer = Scorer(names, num_workers=1)
    batches = rank_batches(1, NUM_SAMPLES // BATCH_SIZE, rank=accelerator.process_index, world_size=2)
    samples = [batch_samples(batch, BATCH_SIZE) for batch in batches]
    for batch in samples:
        prompts = [sample_prompt(sample) for sample in batch]
        images = torch.stack([sample_image(sample) for sample in batch])
        scorer.submit(list(names), images, prompts, [{}] * len(batch), batch)
    table = torch.zeros(NUM_SAMPLES, len(names), dtype=torch.float64)
    scores = torch.tensor(list(scorer.results().values()), dtype=torch.float64).T
    table[[sample for batch in samples for sample in batch]] = scores
    table = reduce_to_cpu(accelerator, table)
    if accelerator.is_main_process:
        torch.save(table, path)
    scorer.close()
    accelerator.end_training()
