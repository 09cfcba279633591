"""For `data.transform`: a row that names a video becomes one with a few of its frames as images, in their order.

{"video": "a.mp4", "question": …, "answer": …} is read by any vision-language model that takes several images. Frames
are evenly spaced; they are decoded when a micro-batch is made, and never written to disk.
"""

from pathlib import Path

import av

FRAMES = 4


def frames(row: dict) -> dict:
    """The row with `images` in place of `video`; `<image>` stands before the question once for each."""
    video = Path(row["video"])
    with av.open(str(video)) as file:
        stream = file.streams.video[0]
        seconds = float(stream.duration * stream.time_base)
    times = [seconds * (number + 0.5) / FRAMES for number in range(FRAMES)]
    images = [{"video": str(video), "seconds": time} for time in times]
    return {"question": "<image>" * FRAMES + row["question"], "answer": row["answer"], "images": images}
