// Numbers, dates and scores as a person reads them.

const whole = new Intl.NumberFormat("en");
const fraction = new Intl.NumberFormat("en", { maximumSignificantDigits: 6 });
/** Below this a whole number may be a year, and is written without a comma. */
const MIN_GROUPED = 10_000;

export const digits = (number) => whole.format(number);
export const count = (number, one, many = `${one}s`) => `${digits(number)} ${number === 1 ? one : many}`;

/** Show a score as the terminal does. */
export const score = (value, places = 3) => value.toFixed(places).replace(/^(-?)0\./, "$1.");

/** A moment as a date and a time; what is none is shown as it is. */
export const moment = (text) => formatted(text, { dateStyle: "medium", timeStyle: "short" });

/** A value of a column of this type. */
export function valueOf(value, type = "") {
  if (type.startsWith("date")) return formatted(value, { dateStyle: "medium", timeZone: "UTC" });
  if (type.startsWith("timestamp")) return moment(value);
  if (typeof value === "object") return JSON.stringify(value);
  if (typeof value !== "number") return String(value);
  return Number.isInteger(value) && Math.abs(value) < MIN_GROUPED ? String(value) : (Number.isInteger(value) ? whole : fraction).format(value);
}

function formatted(text, style) {
  const date = new Date(text);
  return Number.isNaN(date.valueOf()) ? String(text) : new Intl.DateTimeFormat("en", style).format(date);
}
