"""A script for TRL's DDPOTrainer, moved to flowrl: the reward and the prompts are as they were.

It takes about two minutes on two cores: python docs/examples/from_trl.py
"""

import random

import flowrl

things = ["red circle", "blue square", "green triangle", "yellow cross", "red square"]


def prompt_fn():
    """Draw a prompt and its metadata, as DDPOTrainer calls it."""
    return random.choice(things), {}


def scorer(images, prompts, metadata):
    """Score bright images, as DDPOTrainer calls it -> (scores, more to log)."""
    return images.mean(dim=(1, 2, 3)), {}


def reward(images, prompts):
    """Score images as flowrl calls it: one number for each."""
    return scorer(images, prompts, [{} for _ in prompts])[0]


if __name__ == "__main__":
    drawn = {f"a {prompt_fn()[0]}" for _ in range(200)}  # a list in place of a function
    run = flowrl.train(
        "shapes/ddpo",  # for Stable Diffusion 1.x: sd15/ddpo
        "runs/from-trl",
        prompts=sorted(drawn),
        rewards=reward,
        train={"iterations": 5, "prompts": 8},  # num_epochs; images of an epoch by prompt
        optimizer={"lr": 3e-4},  # train_learning_rate
        plan={"steps": 6},  # sample_num_steps
    )
    print(run.gain)
    run.export(run.folder / "exported")  # save_pretrained; run.push_to_hub(repo_id) uploads it
