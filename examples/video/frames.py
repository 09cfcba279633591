"""For `data.transform`: a row that names a video becomes one with a few of its frames as images, in their order.

{"video": "a.mp4", "question": …, "answer": …} is read by any vision-language model that takes several images. Frames
are evenly spaced; they are decoded when a micro-batch is made, and never written to disk. Other rows stay as they are.
"""

from pathlib import Path

import av

FRAMES = 4


def frames(row: dict) -> dict:
    """The row with `images` in place of `video`; `<image>` stands before the question once for each."""
    video = row.pop("video", None)
    if video is None:
        return row
    if not isinstance(video, str):
        raise ValueError(f"video is {video!r:.60}, not the name of a file; frames are given as images")
    if row.get("images") or row.get("image"):
        raise ValueError("the row has a video and images: which comes first is open")
    file = str(Path(video).absolute())
    times = [length(file) * (number + 0.5) / FRAMES for number in range(FRAMES)]
    images = [{"video": file, "seconds": time} for time in times]
    return {**row, "question": "<image>" * FRAMES + row["question"], "images": images}


def length(file: str) -> float:
    """How many seconds a video takes; some containers state it of the file alone."""
    with av.open(file) as opened:
        if not opened.streams.video:
            raise ValueError(f"{file} holds no video")
        stream = opened.streams.video[0]
        if stream.duration is not None:
            return float(stream.duration * stream.time_base)
        if opened.duration is None:
            raise ValueError(f"{file} states no length, as a video does")
        return opened.duration / av.time_base
