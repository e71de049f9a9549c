"""Training: objectives and data of one trainer.

    trainer.py       the one loop: rates, gradients, checkpoints, log, scores    grad_cache.py, processes.py
    contrastive.py   cairn train: pairs.py, pair_data.py, sequences.py, …
    pretrain.py      cairn pretrain: texts                                       token_stream.py
    distill.py       cairn distill: a teacher's states and vectors
    mixer.py         cairn train-mixer: a landmark mixer                         mixer_data.py
    late.py          cairn train-late: a token projection                        token_head.py
    losses.py        what is minimised; settings.py the settings of all five

:mod:`~cairn.pipeline.lab.train.trainer` says how to add an objective.
"""
