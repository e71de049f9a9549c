"""The transformer layer and what runs it.

    families ─▶ transformer ─▶ hidden states
                 │ layer (its steps, over operations): in_place | differentiable | openvino_graph
                 │ weights, rotary, workspace, precision
                 └ pattern (who sees whom): rectangle | packed | landmark_windows
                     └ attention, block_local_attention, landmark_attention

``backbone`` is the protocol that the rest of the pipeline knows. ``openvino_backbone`` runs the layers as an
OpenVINO graph, training runs them differentiably. Import from the modules; this package imports nothing by
itself.
"""
