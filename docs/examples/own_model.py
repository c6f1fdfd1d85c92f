"""Train a pipeline that is already loaded on a list of prompts and a function, and look at it.

It takes about two minutes on two cores: python docs/examples/own_model.py
"""

import diffusers

import flowrl

# any pipeline of diffusers; this small one is included, and has no T5
pipe = diffusers.StableDiffusion3Pipeline.from_pretrained(
    "assets/shapes-sd3", text_encoder_3=None, tokenizer_3=None
)
colors, shapes = ["red", "green", "blue", "yellow"], ["circle", "square", "triangle", "cross"]
prompts = []
for color in colors:
    for shape in shapes:
        prompts.append({"prompt": f"a {color} {shape}", "color": color})


def redness(images, color, **record):
    """Score how much redder than green an image is, where red is asked for, and the opposite."""
    found = images[:, 0].mean((1, 2)) - images[:, 1].mean((1, 2))
    signs = [1 if one == "red" else -1 for one in color]
    return found * found.new_tensor(signs)


if __name__ == "__main__":
    run = flowrl.train(
        "shapes/flow_grpo",
        "runs/own-model",
        model=pipe,
        prompts=prompts,
        rewards=redness,
        train={"iterations": 10, "prompts": 8},
        resume="auto",  # the same command goes on after a stop
    )
    print(run.gain)
    print(f"best: {run.best}")
    run.sample(["a red circle"])[0].save(run.folder / "red-circle.png")
    print(f"a page with curves and images: {run.report()}")
    print(f"a whole pipeline: {run.export(run.folder / 'exported')[0].parent}")
