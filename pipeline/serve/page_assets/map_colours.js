// Which colour a cluster has on the map. The hue goes round the map as the clusters do, so that each region has colours of its own, and no
// two clusters have the same. Clusters that follow one another differ in lightness, too, which is seen without red, green or blue as well.

const d3 = globalThis.d3;

/** Lightnesses (CIE L*) that stand out from the ground of either theme; tests measure this. */
const LIGHTNESSES = { light: [32, 57, 44], dark: [60, 90, 74] };
const CHROMA = { light: 62, dark: 58 };

/** Give each cluster its place in a circle round the middle of all of them, 0 to the number of clusters. */
export function orderClusters(clusters) {
  const [x, y] = [d3.mean(clusters, (each) => each.x), d3.mean(clusters, (each) => each.y)];
  const around = d3.sort(clusters, (each) => Math.atan2(each.y - y, each.x - x));
  return new Map(around.map(({ cluster }, place) => [cluster, place]));
}

/** Return the colour of each cluster in order, in a "light" or a "dark" theme. */
export function coloursOfClusters(number, theme) {
  const lightnesses = LIGHTNESSES[theme];
  const step = (place) => (place > 0 && place === number - 1 && place % 3 === 0 ? 1 : place % 3); // the last stands beside the first
  return d3.range(number).map((place) => d3.hcl((360 * place) / number, CHROMA[theme], lightnesses[step(place)]).formatHex());
}

/** Black or white, whichever is read better on a colour; tells dark grounds from light ones, too. */
export function inkOn(colour) {
  const { r, g, b } = d3.rgb(colour);
  const [red, green, blue] = [r, g, b].map((part) => (part <= 10 ? part / 3294 : ((part / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000" : "#fff";
}
