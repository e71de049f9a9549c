"""Training: objectives and data of one trainer.

    trainer.py                 the one loop: rates, gradients, checkpoints, log, scores     gradients.py
    contrastive.py             cairn train: pairs.py, pair_data.py, sequences.py, …
    pretrain.py                cairn pretrain: texts                                        token_stream.py
    distill.py                 cairn distill: a teacher's states and vectors
    landmark_distillation.py   cairn train-landmarks: texts
    default_encoder.py         python -m cairn.jobs.train_default: two of these, in one command
    losses.py                  what is minimised; settings.py the settings of all

:mod:`~cairn.pipeline.lab.train.trainer` says how to add an objective.
"""
