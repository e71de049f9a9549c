"""The transformer layer and what runs it.

    families ─▶ transformer (a layer's steps, over its operations or openvino_backbone's) ─▶ hidden states
                 │ weights, rotary, precision
                 └ pattern (who sees whom): rectangle | packed
                     └ attention

``backbone`` is what the rest of the pipeline knows. ``openvino_backbone`` runs the layers as an OpenVINO
graph, the laboratory runs them differentiably. Import from the modules; this package imports nothing by
itself.
"""
