// Elements from values. Whatever a document, a title or an answer holds enters the page here, as text.

const SVG = "http://www.w3.org/2000/svg";

/** Make an element: `on` holds listeners, `data` data attributes; null and false leave an attribute out. */
export function make(tag, { on = {}, data = {}, ...attributes } = {}, ...children) {
  const element = tag.startsWith("svg:") ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const [event, listener] of Object.entries(on)) element.addEventListener(event, listener);
  Object.assign(element.dataset, data);
  element.append(...children.filter((child) => child !== null && child !== undefined).map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

export const byId = (id) => document.getElementById(id);
