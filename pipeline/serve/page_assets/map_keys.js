// The map by keyboard: from a point to its neighbour on either side, from one found document to the next, closer and farther.

export const KEYS_OF_MAP = "Arrows move, n and p go through what was found, + and − zoom, 0 shows all, Enter opens";
const DIRECTIONS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const ONE_PLACE_PIXELS = 0.5;

/** Return what a key asks of the map: {direction}, {hit}, {zoom}, {all}, {open}, or null. */
export function askedBy(key) {
  if (key in DIRECTIONS) return { direction: DIRECTIONS[key] };
  if (key === "n" || key === "p") return { hit: key === "n" ? 1 : -1 };
  if (key === "+" || key === "=" || key === "-") return { zoom: key === "-" ? 1 / 1.5 : 1.5 };
  if (key === "0") return { all: true };
  return key === "Enter" || key === " " ? { open: true } : null;
}

/** Return the nearest point in a direction, null where there is none; `at` gives pixels. Points of one place follow one another in order. */
export function neighbour(points, here, at, [right, down]) {
  const [left, top] = at(here);
  const own = points.indexOf(here);
  let [best, least] = [null, Infinity];
  points.forEach((point, index) => {
    if (point === here) return;
    let [across, along] = at(point);
    [across, along] = [across - left, along - top];
    if (Math.abs(across) < ONE_PLACE_PIXELS && Math.abs(along) < ONE_PLACE_PIXELS) [across, along] = [(index - own) / points.length, 0];
    const ahead = across * right + along * down;
    const aside = Math.abs(across * down) + Math.abs(along * right);
    const cost = ahead + 2 * aside;
    if (ahead > 0 && aside <= ahead && cost < least) [best, least] = [point, cost];
  });
  return best;
}
