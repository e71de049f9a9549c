// Which colour a cluster has on the map. Neighbours on the map get different ones of eight, which stay apart for people who see no red, no
// green or no blue, and stand out from the ground of either theme; tests measure both.

const d3 = globalThis.d3;

export const HUES = {
  light: ["#0268d0", "#d28017", "#59148d", "#0ba3a0", "#ae3285", "#5c6c14", "#a47cf9", "#791b0c"],
  dark: ["#49a7fa", "#fed917", "#fa8fa4", "#1df9f4", "#b0451a", "#9ba003", "#8c51c8", "#057c79"],
};
const SWEEPS = 4;

/** Give each cluster, largest first, a place in HUES: the one that the fewest of its neighbours' points have. */
export function colourClusters(points, clusters) {
  const bordersOf = borders(points);
  const hues = new Map();
  const used = HUES.light.map(() => 0);
  for (let sweep = 0; sweep < SWEEPS; sweep += 1) {
    for (const { cluster } of clusters) {
      const cost = HUES.light.map(() => 0);
      for (const [other, edges] of bordersOf.get(cluster) ?? []) if (hues.has(other)) cost[hues.get(other)] += edges;
      if (hues.has(cluster)) used[hues.get(cluster)] -= 1;
      const best = d3.leastIndex(cost, (a, b) => a - b);
      const hue = d3.least(d3.range(cost.length).filter((index) => cost[index] === cost[best]), (index) => used[index]);
      hues.set(cluster, hue);
      used[hue] += 1;
    }
  }
  return hues;
}

/** How many pairs of neighbouring points lie in each two clusters: cluster ─▶ other ─▶ edges of the triangulation. */
function borders(points) {
  const found = new Map();
  const { halfedges, triangles } = d3.Delaunay.from(points, (point) => point.x, (point) => point.y);
  const touch = (a, b) => {
    if (!found.has(a)) found.set(a, new Map());
    found.get(a).set(b, (found.get(a).get(b) ?? 0) + 1);
  };
  for (let edge = 0; edge < halfedges.length; edge += 1) {
    if (halfedges[edge] > edge) continue; // the same edge, met later from its other side
    const [a, b] = [points[triangles[edge]].cluster, points[triangles[edge % 3 === 2 ? edge - 2 : edge + 1]].cluster];
    if (a === b) continue;
    touch(a, b);
    touch(b, a);
  }
  return found;
}

/** Black or white, whichever is read better on a colour; tells dark grounds from light ones, too. */
export function inkOn(colour) {
  const { r, g, b } = d3.rgb(colour);
  const [red, green, blue] = [r, g, b].map((part) => (part <= 10 ? part / 3294 : ((part / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000" : "#fff";
}
