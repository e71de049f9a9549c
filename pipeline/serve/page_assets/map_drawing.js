// The map on its canvas: points, the names of clusters, the answer's documents with their ranks, and what is pointed at.

import { coloursOfClusters, inkOn } from "./map_colours.js";

const MARGIN = 28;
const FULL_TURN = 2 * Math.PI;
const NAME_STEPS = [0, -17, 17, -34, 34];
const FONT = "Inter, system-ui, sans-serif";

/** Return how places in [-1, 1]² lie on a canvas of this size under a zoom: x and y give CSS pixels, plain gives them without the zoom. */
export function scaleOf({ clientWidth: width, clientHeight: height }, zoom) {
  const side = Math.min(width, height) / 2 - MARGIN;
  const stretch = Math.min(1.6, Math.max(width, height) / Math.min(width, height));
  const across = width > height ? side * stretch : side;
  const up = height > width ? side * stretch : side;
  const plain = (point) => [width / 2 + point.x * across, height / 2 - point.y * up];
  return { width, height, across, up, plain, at: (point) => zoom.apply(plain(point)) };
}

/** Colours of the panel as it looks now; `order` has the clusters' places in the circle. */
export function coloursOf(element, order) {
  const { color: ink, backgroundColor: ground } = getComputedStyle(element);
  const soft = getComputedStyle(element.querySelector(".map-caption")).color;
  const found = coloursOfClusters(order.size, inkOn(ground) === "#fff" ? "dark" : "light");
  return { ink, ground, soft, of: (cluster) => found[order.get(cluster)] ?? soft };
}

/** Draw it all; `looked` is the point that is pointed at or focused, `chosen` the cluster that stands out, or null. */
export function drawMap(canvas, { points, clusters, found, zoom, looked, chosen, colours }) {
  const { width, height, at } = scaleOf(canvas, zoom);
  if (!width || !height) return;
  canvas.width = width * devicePixelRatio;
  canvas.height = height * devicePixelRatio;
  const context = canvas.getContext("2d");
  context.scale(devicePixelRatio, devicePixelRatio);
  const disc = (left, top, radius, fill) => {
    context.beginPath();
    context.arc(left, top, radius, 0, FULL_TURN);
    context.fillStyle = fill;
    context.fill();
  };
  const radius = Math.min(4.5, Math.max(1.7, 90 / Math.sqrt(points.length + 1)) * Math.sqrt(zoom.k));
  for (const point of points) {
    const isBack = chosen === null ? found.length > 0 : point.cluster !== chosen;
    context.globalAlpha = chosen !== null && isBack ? 0.14 : isBack ? 0.38 : 0.9;
    disc(...at(point), radius, colours.of(point.cluster));
  }
  context.globalAlpha = 1;
  const discs = found.map((point, index) => ({ point, rank: index + 1, size: point === looked ? 12 : index < 3 ? 9.5 : 7.5 }));
  drawNames(context, { clusters, at, width, height, colours, discs, chosen });
  for (const { point, rank, size } of discs.toReversed()) {
    const [left, top] = at(point);
    disc(left, top, size + 2, point === looked ? colours.ink : colours.ground);
    disc(left, top, size, colours.of(point.cluster));
    if (size < 9) continue;
    context.font = `650 10px ${FONT}`;
    context.fillStyle = inkOn(colours.of(point.cluster));
    context.fillText(rank, left, top + 0.5);
  }
  if (looked && !found.includes(looked)) {
    const [left, top] = at(looked);
    disc(left, top, radius + 4.5, colours.ink);
    disc(left, top, radius + 2.5, colours.ground);
    disc(left, top, radius + 0.5, colours.of(looked.cluster));
  }
}

/** Write names of clusters where there is room for them; those that the answer lies in come first, and in full ink. */
function drawNames(context, { clusters, at, width, height: tall, colours, discs, chosen }) {
  const wanted = new Set(chosen === null ? discs.map(({ point }) => point.cluster) : [chosen]);
  const taken = discs.map(({ point, size }) => ({ left: at(point)[0], top: at(point)[1], half: size, tall: size }));
  context.font = `600 13px ${FONT}`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.lineJoin = "round";
  for (const place of [...clusters].sort((a, b) => wanted.has(b.cluster) - wanted.has(a.cluster))) {
    if (!place.name) continue;
    const [middle, height] = at(place);
    if (middle < 0 || middle > width || height < 0 || height > tall) continue;
    const half = context.measureText(place.label).width / 2 + 6;
    const left = Math.min(Math.max(middle, half), width - half);
    const isFree = (top) => taken.every((other) => Math.abs(other.left - left) >= other.half + half || Math.abs(other.top - top) >= 9 + other.tall);
    const step = NAME_STEPS.slice(0, wanted.has(place.cluster) ? undefined : 1).find((step) => isFree(height + step));
    if (step === undefined) continue;
    const top = height + step;
    taken.push({ left, top, half, tall: 9 });
    context.strokeStyle = colours.ground;
    context.lineWidth = 4;
    context.strokeText(place.label, left, top);
    context.fillStyle = !wanted.size || wanted.has(place.cluster) ? colours.ink : colours.soft;
    context.fillText(place.label, left, top);
  }
}
